"""What runs on the device: compiled steps, their inputs and their state."""
