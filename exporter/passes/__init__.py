"""Rewrites of a traced graph, one a file; ``exporter/pipeline.py`` lists them in their order."""
