"""A page of Weights & Biases with the charts of TensorBoard, for runs with metrics.enable_wandb: few come first.

pip install wandb-workspaces && wandb login
python -m tools.wandb_page ENTITY PROJECT
"""

import sys

from titan_linear.hooks.metrics import CHARTS


def main(entity: str, project: str) -> None:
    from wandb_workspaces.reports.v2 import LinePlot  # neither is needed elsewhere
    from wandb_workspaces.workspaces import Section, Workspace

    sections = []
    for group, charts in CHARTS.items():
        plots = [
            LinePlot(title=name, x="step", metric_regex="|".join(tags))
            for name, tags in charts.items()
        ]
        sections.append(Section(name=group, panels=plots, is_open=not sections))
    page = Workspace(entity=entity, project=project, name="titan_linear", sections=sections)
    page.save()
    print(page.url)


if __name__ == "__main__":
    main(*sys.argv[1:])
