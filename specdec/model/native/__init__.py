"""Our own CPU kernels: bfloat16 weights, float32 arithmetic, results that no batch can change."""
