"""NVIDIA's attention and convolutions, called where PyTorch would copy: cuDNN writes results where it is told.
`library.py` is the only file that calls it, `attention.py` and `convolution.py` say what is computed, `ways.py` which
regions that suits."""
