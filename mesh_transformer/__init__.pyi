from mesh_transformer.runtime.api.entry import fit as fit
from mesh_transformer.runtime.api.entry import load as load
from mesh_transformer.runtime.api.model import Model as Model
from mesh_transformer.runtime.api.results import Completion as Completion
from mesh_transformer.runtime.api.results import Score as Score
from mesh_transformer.runtime.api.server import Server as Server
from mesh_transformer.runtime.api.training import Run as Run

__version__: str
