"""What all tests share."""

from __future__ import annotations

import torch

# Tiny models are slower with more threads, and a second test process may run beside.
torch.set_num_threads(1)
