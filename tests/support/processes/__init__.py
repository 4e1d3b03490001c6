"""Scripts and checks that run in processes of their own, and how long tests wait for them."""
