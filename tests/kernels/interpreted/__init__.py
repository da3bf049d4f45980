"""Every kernel on a CPU, under Triton's interpreter, in its served configuration over odd shapes.

`interpret.py` runs these files, in a process of their own: the interpreter must be chosen before Triton is imported.
"""

import torch

HALF, FULL = torch.float16, torch.float32
"""float16 replaces bfloat16, whose products the interpreter computes wrongly."""
