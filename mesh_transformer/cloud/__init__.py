"""TPU VMs and what runs on their hosts: the Cloud TPU API, SSH, provisioning. Imports neither jax nor ray."""
