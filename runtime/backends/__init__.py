"""What runs a bundle's graphs: a folder a backend, which the others and the rest of the runtime do not import."""
