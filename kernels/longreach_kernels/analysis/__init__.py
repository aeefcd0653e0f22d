"""What attention costs, counted: tiles, FLOPs, and bytes between HBM and the chip. No kernel needs it."""
