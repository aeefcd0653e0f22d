"""Our attention kernels beside their peers and the ceilings of the machine."""
