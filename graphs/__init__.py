"""Torch modules, from which each graph of a bundle is traced.

See ``docs/graph-contract.md`` for the tensors and ``specexport.contract.tensors`` for their names.
"""
