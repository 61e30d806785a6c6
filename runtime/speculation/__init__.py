"""Decides how much each step speculates: the method and the tree of every request, for most tokens a second.

``policy.py`` decides before each step, with the help of

- ``costs.py``: the times of steps and proposals on this machine, which ``timing.py`` measures when a bundle is first
  opened and which later steps refine;
- ``acceptance.py``: the number of draft tokens that a tree is expected to gain, by the request's steps so far;
- ``choice.py``: the combination of trees with most expected tokens a second; its docstring has a worked example;
- ``probing.py``: while nothing pays, the number of steps without a decision, and the time to try a method again.
"""
