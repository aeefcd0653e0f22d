"""The Hopper backend: Gluon kernels for sm_90 where they exist, the portable kernels for everything else."""
