"""One module a command: its summary is the module's docstring, ``add_arguments`` its flags, ``main`` its work."""
