"""A module of 2021, with `TPUCluster` as it is today."""

from mesh_transformer.cluster.driver.tpu_cluster import TPUCluster

__all__ = ["TPUCluster"]
