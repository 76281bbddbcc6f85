"""Ways to serve or to relay that Tidegate is compared with, each small and runnable alone."""
