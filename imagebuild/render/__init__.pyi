from .recipe import Recipe as Recipe
from .recipe import pip_platforms as pip_platforms
from .renderer import Dockerfile as Dockerfile
from .renderer import Renderer as Renderer
from .renderer import image_labels as image_labels
from .stages import Stage as Stage
from .stages import needed_stages as needed_stages
from .stages import stages_of as stages_of
