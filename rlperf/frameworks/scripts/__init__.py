"""What launch scripts of the shell and Python programs state, without running them."""
