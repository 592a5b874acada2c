"""What other packages must be told before they are imported or started: torchvision beside a CPU torch, DeepSpeed."""
