"""The OpenAI-compatible server: ``specexport serve``. Needs the ``[serve]`` extra."""
