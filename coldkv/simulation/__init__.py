"""What a cold pool buys for a workload: request traces replayed through the live pool."""
