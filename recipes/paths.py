"""The sections of a recipe, and the paths of a run's files."""

from pathlib import Path

from draftsmith.recipes.sections.base import Section, as_list
from draftsmith.recipes.sections.data import DataSection
from draftsmith.recipes.sections.drafter import DrafterSection
from draftsmith.recipes.sections.eval import EvalSection, ExportSection
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.recipes.sections.train import ClassifierSection, LabelSection, TrainSection

PICTURE_PROMPTS = "prompts.jsonl"


class RunPaths(Section):
    """The sections of a recipe, with the paths of a run's files, defaults resolved."""

    output_dir: str
    """Folder for everything that a run writes."""
    target: TargetSection
    data: DataSection = DataSection()
    drafter: DrafterSection = DrafterSection()
    train: TrainSection = TrainSection()
    labels: LabelSection = LabelSection()
    classifier: ClassifierSection = ClassifierSection()
    eval: EvalSection = EvalSection()
    export: ExportSection = ExportSection()

    @property
    def conversations_path(self) -> Path:
        """Regenerated conversations."""
        return Path(self.data.conversations or Path(self.output_dir) / "conversations.jsonl")

    @property
    def picture_prompts_path(self) -> Path:
        """Prompts about pictures."""
        return Path(self.data.reprompt.out or Path(self.output_dir) / PICTURE_PROMPTS)

    @property
    def reprompts(self) -> bool:
        """Whether the prompts for training are those that reprompt writes."""
        return self.data.reprompt.sources is not None and str(self.picture_prompts_path) in as_list(self.data.prompts)

    @property
    def training_rejects_path(self) -> Path:
        """Conversations without a training row, with the reason. rank_vocab and training leave out the same ones."""
        return Path(self.output_dir) / "conversations.training_rejects.jsonl"

    @property
    def contamination_path(self) -> Path:
        """Training conversations with questions of eval.prompts, one JSON line each."""
        return Path(self.output_dir) / "contamination.jsonl"

    @property
    def draft_vocab_path(self) -> Path:
        return Path(self.output_dir) / "draft_vocab.safetensors"

    @property
    def token_counts_path(self) -> Path:
        """Counts of each target token in supervised positions. FR-Spec's cuts rank by them."""
        return Path(self.eval.token_counts or Path(self.output_dir) / "token_counts.safetensors")

    @property
    def planner_costs_path(self) -> Path:
        return Path(self.output_dir) / "planner_costs.json"

    @property
    def sam_path(self) -> Path:
        """The sorted corpus that data_gen/build_sam.py writes."""
        return Path(self.data.sam.out or Path(self.output_dir) / "sam.safetensors")

    @property
    def static_sams(self) -> list[Path]:
        """The sorted corpora that contenders look in."""
        sections = [each for contender in self.eval.contenders for each in (contender.sam, contender.router)]
        return [Path(section.static) for section in sections if section is not None and section.static is not None]

    @property
    def measures_drafter(self) -> bool:
        """Whether a contender drafts by eval.drafter."""
        others = any(each.drafts_by_drafter and each.drafter is None for each in self.eval.also)
        return others or self.eval.drafts_by_drafter

    @property
    def drafter_dir(self) -> Path:
        """The final drafter of training."""
        return Path(self.output_dir) / "drafter"

    @property
    def states_dir(self) -> Path:
        """Hidden states that data_gen/capture.py writes."""
        return Path(self.data.states or Path(self.output_dir) / "states")

    @property
    def labelled_trees_path(self) -> Path:
        """Rows that data_gen/label_trees.py writes."""
        return Path(self.labels.out or Path(self.output_dir) / "labelled_trees.safetensors")

    @property
    def classifier_rows_path(self) -> Path:
        """Rows that the classifier is trained on."""
        return Path(self.classifier.rows or self.labelled_trees_path)

    @property
    def classifier_dir(self) -> Path:
        """The trained C2T classifier."""
        return Path(self.classifier.out or Path(self.output_dir) / "c2t")

    @property
    def checkpoints_dir(self) -> Path:
        return Path(self.output_dir) / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        """One JSON line per logged training step."""
        return Path(self.output_dir) / "metrics.jsonl"

    @property
    def eval_drafter_dir(self) -> Path:
        """The measured drafter."""
        return Path(self.eval.drafter or self.drafter_dir)

    @property
    def eval_out(self) -> Path:
        """Folder of acceptance.json, generations.jsonl and report.html."""
        return Path(self.eval.out or Path(self.output_dir) / "eval")

    @property
    def imported_dir(self) -> Path:
        """Our copies of the foreign drafters that the recipe names."""
        return Path(self.output_dir) / "imported"

    def export_dir(self, engine: str) -> Path:
        """The drafter as an engine reads it."""
        return Path(self.export.out or Path(self.output_dir) / "export" / engine)
