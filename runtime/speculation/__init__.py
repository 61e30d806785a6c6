"""How much each step speculates: the method and the tree of every request, for most tokens a second.

``policy.py`` decides before each step. It asks

- ``costs.py`` how long steps and proposals take on this machine; ``timing.py`` measures that when a bundle is first
  opened,
- ``acceptance.py`` how many draft tokens of a tree will be accepted, by the request's steps so far,
- ``choice.py`` which combination of trees commits most tokens a second; its docstring has a worked example.

While nothing pays, ``probing.py`` says how many steps pass without a decision, and when to try a method again.
"""
