"""TPU VMs and their hosts: the Cloud TPU API, SSH, provisioning. This package imports neither jax nor ray."""
