"""The methods, a module or a folder each. They are entry points: no other package imports them by name."""
