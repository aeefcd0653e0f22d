"""What developers measure: kernels, other servers, policies and methods. Run each as `python -m benchmarks.NAME`."""
