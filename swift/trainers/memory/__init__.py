"""What leaves the device while an engine uses it: the cycle of colocated engines, and the moving itself."""
