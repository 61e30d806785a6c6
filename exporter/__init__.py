"""From a checkpoint to a bundle: load, check, trace, rewrite, quantize, write. Needs the ``[export]`` extra."""
