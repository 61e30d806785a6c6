"""What is compiled: torch modules that say what each graph of a bundle computes, over their input/output contracts.

See ``docs/graph-contract.md`` for the tensors and ``specexport.contract.tensors`` for their names.
"""
