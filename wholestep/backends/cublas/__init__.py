"""Matrix products by cuBLAS, with the algorithm that the clock says: `matrices.py` sees a product as matrices that lie
in memory, `library.py` calls cuBLASLt, `ways.py` offers its algorithms."""
