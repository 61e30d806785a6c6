"""How a checkpoint becomes a bundle: load, trace, rewrite, quantize, write, verify. Needs the ``[export]`` extra."""
