"""The ways to propose draft tokens, a file each; one protocol, so that the loop does not know which one it runs."""
