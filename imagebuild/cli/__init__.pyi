from .app import COMMANDS as COMMANDS
from .app import app as app
from .app import load_command as load_command
from .app import main as main
from .job import offer_of_plan as offer_of_plan
from .options import ProjectFiles as ProjectFiles
from .publish import pushed_images as pushed_images
from .publish import run_for_each as run_for_each
