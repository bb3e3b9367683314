"""From a forward program to the whole training step: autodiff, clipping, the optimizer's update."""
