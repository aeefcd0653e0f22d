"""The step on the device: tensors, the forward pass, and the draw. It knows nothing of requests' lives."""
