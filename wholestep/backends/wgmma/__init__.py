"""Matrix products and convolutions for Hopper GPUs, with what follows them inside: CUDA C++ around the instruction of
the tensor cores.

`products.py` sees a region as such a product and writes what follows, `windows.py` sees a convolution as one,
`product.cu` is the kernel around it, `library.py` calls NVIDIA's compiler and driver, `ways.py` offers and launches."""
