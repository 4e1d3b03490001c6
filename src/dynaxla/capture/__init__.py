"""From what TorchDynamo hands over to a functional ATen graph, and what that graph's inputs and outputs are in memory."""
