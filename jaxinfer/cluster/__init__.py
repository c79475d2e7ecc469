"""Several engines, on one machine or many, through Ray: batch jobs (Ray Data) and servers (Ray Serve)."""
