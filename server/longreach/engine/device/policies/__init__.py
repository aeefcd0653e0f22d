"""What each layer computes under a request's attention policy, and what that leaves out."""
