"""Pictures and videos as a person sees and cuts them."""
