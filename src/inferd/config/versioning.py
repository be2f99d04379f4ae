"""Which versions of a model are served, how a new one comes to serve, what its files must be, and whether its answers
stay the same.

``versions.py`` makes entries of the configuration from it, ``rollout/`` follows the steps, and ``registry/verified.py``
loads what was verified.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from inferd.config.patterns import DIGEST
from inferd.config.section import Section


class VersionsConfig(Section, frozen=True, kw_only=True):
    """Which versions of a model with numbered subfolders are served: 1/, 2/, ..."""

    policy: Annotated[
        Literal["latest", "specific", "all"],
        Meta(
            description="latest: the highest numbers, or the two of the rollout; specific: those in 'only'; all: every "
            "one."
        ),
    ] = "latest"
    count: Annotated[int, Meta(description="How many versions are served by the policy latest.", ge=1)] = 1
    only: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...], Meta(description="The versions that the policy specific serves.")
    ] = ()
    aliases: Annotated[
        dict[str, Annotated[int, Meta(ge=1)]],
        Meta(description="Names for versions: with stable: 3, the name MODEL@stable is version 3."),
    ] = {}
    weights: Annotated[
        dict[str, Annotated[float, Meta(ge=0)]],
        Meta(
            description=(
                "Percent of the requests for the model's own name that each version serves: {3: 90, 4: 10}. They add "
                "up to 100. Requests of one session or user stay with one version. Unset: the newest gets all."
            )
        ),
    ] = {}


_RATIO = "Bad units of the new version may be less than so many times as likely as those of the stable one."
_FRACTION = "So large a part of the new version's units may be bad"

Ratio = Annotated[float, Meta(gt=1, le=100)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]


class RolloutStepConfig(Section, frozen=True, kw_only=True):
    """A share of the units for the new version. The shares grow from step to step."""

    weight: Annotated[
        Annotated[float, Meta(ge=0, le=100)] | None,
        Meta(description="Percent of the units that the new version serves. Unset: as in the step before, 0 at first."),
    ] = None
    shadow: Annotated[
        float,
        Meta(
            description=(
                "Percent of the units whose requests are copied to the new version while the stable one answers them. "
                "A copy reaches no client, is charged to no tenant, and is compared with the answer."
            ),
            ge=0,
            le=100,
        ),
    ] = 0.0
    for_s: Annotated[
        float, Meta(description="Seconds that the step lasts at least, without the time of pauses.", ge=0)
    ] = 0.0
    approval: Annotated[bool, Meta(description="The step begins with `inferd rollout promote` alone.")] = False


class ErrorsGuardConfig(Section, frozen=True, kw_only=True):
    """Units with a request that failed by the server's fault, or was refused for lack of capacity."""

    max_ratio: Annotated[Ratio | None, Meta(description=_RATIO + " Unset: they are not compared.")] = 2.0
    max_fraction: Annotated[
        Fraction | None, Meta(description=_FRACTION + ", whatever the stable version's are. Unset: none may.")
    ] = 0.01


class InvalidGuardConfig(Section, frozen=True, kw_only=True):
    """Units with a request that the version refused as invalid. Unset: they are not watched."""

    max_ratio: Annotated[Ratio | None, Meta(description=_RATIO + " Unset: they are not compared.")] = 2.0
    max_fraction: Annotated[
        Fraction | None, Meta(description=_FRACTION + ", whatever the stable version's are. Unset: none may.")
    ] = 0.01


class SlowGuardConfig(Section, frozen=True, kw_only=True):
    """Units with a request that took longer than an objective. Unset: they are not watched."""

    over_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description=(
                "A longer time from the request's arrival to the end of its answer is bad. Unset, and first_over_ms as "
                "well: the model's objectives.total_ms and objectives.ttft_ms, those that it has."
            )
        ),
    ] = None
    first_over_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="A longer time to the first token is bad; for predictions, until the model has computed."),
    ] = None
    max_ratio: Annotated[Ratio | None, Meta(description=_RATIO + " Unset: they are not compared.")] = 1.5
    max_fraction: Annotated[
        Fraction | None, Meta(description=_FRACTION + ", whatever the stable version's are. Unset: none may.")
    ] = None

    def limits_ms(self, total_ms: float | None, ttft_ms: float | None) -> tuple[float | None, float | None]:
        """The milliseconds to the end and to the first token above which a request is slow, given the model's
        objectives; None: there is no such limit."""
        if self.over_ms is None and self.first_over_ms is None:
            return total_ms, ttft_ms
        return self.over_ms, self.first_over_ms


class RefusedGuardConfig(Section, frozen=True, kw_only=True):
    """Units with a generated answer that is a refusal, by its first words. A heuristic. Unset: they are not watched."""

    max_ratio: Annotated[Ratio | None, Meta(description=_RATIO + " Unset: they are not compared.")] = 2.0
    max_fraction: Annotated[
        Fraction | None, Meta(description=_FRACTION + ", whatever the stable version's are. Unset: none may.")
    ] = None


class DiffersGuardConfig(Section, frozen=True, kw_only=True):
    """Units with a copied request that the new version answered otherwise than the stable one, or not at all.

    Texts are equal or differ, as do classes; numbers are equal within a tolerance. Needs a step with 'shadow'. Unset:
    differences are counted, and withdraw nothing.
    """

    max_fraction: Annotated[Fraction, Meta(description="So large a part of the copied units may differ.")] = 0.02
    relative: Annotated[
        float, Meta(description="Numbers may differ by so much, relative to the stable version's.", ge=0, le=1)
    ] = 1e-3
    absolute: Annotated[float, Meta(description="Numbers may differ by so much in addition.", ge=0)] = 1e-6


class ReportedGuardConfig(Section, frozen=True, kw_only=True):
    """Units of which a program of yours reported something bad. Unset: nothing can be reported."""

    max_ratio: Annotated[Ratio | None, Meta(description=_RATIO + " Unset: they are not compared.")] = 2.0
    max_fraction: Annotated[
        Fraction | None, Meta(description=_FRACTION + ", whatever the stable version's are. Unset: none may.")
    ] = None


class GoldenGuardConfig(Section, frozen=True, kw_only=True):
    """Answers of the new version that are not those of a golden set: requests whose right answers are known. In every
    step the server asks requests of the set that it draws by chance. Unset: nothing is asked."""

    file: Annotated[
        str,
        Meta(
            description="The golden set: one JSON object per line, with the request, its path, and contains, equals or "
            "label."
        ),
    ]
    max_fraction: Annotated[
        Fraction | None,
        Meta(description="So large a part of the new version's answers may be wrong. Unset: they are compared alone."),
    ] = 0.02
    max_ratio: Annotated[
        Ratio | None,
        Meta(
            description=(
                "Wrong answers of the new version may be less than so many times as likely as those of the stable one, "
                "which is asked half of the requests then. Unset: the stable version is not asked."
            )
        ),
    ] = None
    relative: Annotated[
        float, Meta(description="Numbers may differ by so much, relative to the expected ones.", ge=0, le=1)
    ] = 1e-3
    absolute: Annotated[float, Meta(description="Numbers may differ by so much in addition.", ge=0)] = 1e-6


class GuardsConfig(Section, frozen=True, kw_only=True):
    """What is watched during a rollout. Each guard counts units with at least one bad event.

    A guard withdraws the new version on evidence that its units are more often bad than those of the stable version,
    or, without max_ratio, more often than max_fraction.
    """

    errors: ErrorsGuardConfig | None = ErrorsGuardConfig()
    invalid: InvalidGuardConfig | None = None
    slow: SlowGuardConfig | None = None
    refused: RefusedGuardConfig | None = None
    differs: DiffersGuardConfig | None = None
    reported: ReportedGuardConfig | None = None
    golden: GoldenGuardConfig | None = None


class RolloutConfig(Section, frozen=True, kw_only=True):
    """The way of a new version of the model from no requests to all.

    Versions are those of numbered subfolders, or entries MODEL@NUMBER. Without this section the newest serves all.
    """

    stable: Annotated[int, Meta(description="Number of the version that serves now.", ge=1)]
    new: Annotated[int, Meta(description="Number of the version that is to serve.", ge=1)]
    steps: Annotated[
        tuple[RolloutStepConfig, ...],
        Meta(description="The steps, in order. After a last step below 100 all units follow by approval."),
    ] = (
        RolloutStepConfig(weight=1.0, for_s=600.0),
        RolloutStepConfig(weight=5.0, for_s=600.0),
        RolloutStepConfig(weight=25.0, for_s=600.0),
        RolloutStepConfig(weight=100.0, for_s=600.0),
    )
    unit: Annotated[
        Literal["auto", "session", "user", "tenant", "request"],
        Meta(
            description=(
                "What keeps one version for all its requests, and is counted once. auto: the sequence, session, user "
                "or Idempotency-Key that the request names, in this order, else the request itself."
            )
        ),
    ] = "auto"
    guards: GuardsConfig = GuardsConfig()
    alpha: Annotated[
        float,
        Meta(
            description="Largest probability that the guards ever withdraw a version which is not worse.",
            gt=0,
            le=0.5,
        ),
    ] = 0.01
    beta: Annotated[
        float, Meta(description="Largest probability that a version which is too bad passes a guard.", gt=0, le=0.5)
    ] = 0.05
    inconclusive_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description=(
                "A step that has lasted for_s and has too little evidence goes on after so many more seconds. Unset: "
                "it waits for the evidence, or for `inferd rollout promote`."
            )
        ),
    ] = None
    max_deaths: Annotated[
        int, Meta(description="So many deaths of the new version's workers withdraw it.", ge=1, le=1000)
    ] = 3
    start: Annotated[
        Literal["command", "auto"],
        Meta(description="Begin by `inferd rollout start`, or as soon as the configuration has the rollout."),
    ] = "command"
    promote: Annotated[
        Literal["auto", "approve"],
        Meta(description="approve: the last step needs an approval too. auto: only the steps that say so."),
    ] = "auto"

    @property
    def weights(self) -> list[float]:
        """The new version's percentage in each step."""
        found: list[float] = []
        for step in self.steps:
            found.append(step.weight if step.weight is not None else found[-1] if found else 0.0)
        return found


class MlflowConfig(Section, frozen=True, kw_only=True):
    """The MLflow server that sources such as mlflow:models:/churn@champion name."""

    url: Annotated[
        str | None,
        Meta(description="Address of the server: https://mlflow.example.com. Unset: MLFLOW_TRACKING_URI."),
    ] = None
    token_env: Annotated[
        str | None,
        Meta(description="Environment variable that holds a bearer token. Unset: MLFLOW_TRACKING_TOKEN, if it is set."),
    ] = None
    token_file: Annotated[
        str | None, Meta(description="File that holds a bearer token; read again whenever the server is asked.")
    ] = None
    username: Annotated[
        str | None,
        Meta(description="Name for HTTP basic authentication. Unset: MLFLOW_TRACKING_USERNAME, if it is set."),
    ] = None
    password_env: Annotated[
        str | None,
        Meta(description="Environment variable that holds its password. Unset: MLFLOW_TRACKING_PASSWORD."),
    ] = None
    timeout_s: Annotated[
        float,
        Meta(description="Longest time for one answer of the registry, and for each read of a download.", gt=0, le=600),
    ] = 10.0
    poll_s: Annotated[
        float,
        Meta(description="Seconds between two looks at the aliases that models follow.", ge=1, le=86_400),
    ] = 10.0
    artifact_roots: Annotated[
        tuple[str, ...],
        Meta(
            description="Folders of this machine from which versions may be copied whose artifacts are files (file:). "
            "None: all artifacts come through the server."
        ),
    ] = ()
    webhook_secret_env: Annotated[
        str | None,
        Meta(
            description="Environment variable that holds the secret of the server's webhook to "
            "/admin/mlflow/webhook. Unset, and the file as well: webhooks are refused."
        ),
    ] = None
    webhook_secret_file: Annotated[str | None, Meta(description="File that holds that secret.")] = None


class SignatureConfig(Section, frozen=True, kw_only=True):
    """The signature of a model by OMS v1.0 (OpenSSF Model Signing), and whose it must be."""

    bundle: Annotated[
        str | None,
        Meta(
            description="The signature's file; a relative path is below the model's folder, or beside a model of one "
            "file. Unset: model.sig, or the file's name with .sig."
        ),
    ] = None
    public_key_file: Annotated[
        str | None, Meta(description="The signer's public key in PEM: P-256, P-384 or P-521.")
    ] = None
    certificate_chain_file: Annotated[
        str | None,
        Meta(description="Trusted roots in PEM, to one of which the signer's certificate must lead."),
    ] = None
    identity: Annotated[
        str | None,
        Meta(
            description="A name that the signer's certificate must have: its common name, or an alternative name. "
            "Unset: any certificate below the roots."
        ),
    ] = None


class VerifyConfig(Section, frozen=True, kw_only=True):
    """What the files of the model must be. Unset: they are loaded as they are found."""

    mode: Annotated[
        Literal["enforce", "warn", "off"],
        Meta(
            description="enforce: a verified copy is loaded, or nothing. warn: a model that does not verify is loaded "
            "from where it is, and the log, the status and a metric say so. off: nothing is verified."
        ),
    ] = "enforce"
    digest: Annotated[
        Annotated[str, Meta(pattern=DIGEST)] | None,
        Meta(description="The digest of the files, as inferd registry digest prints it."),
    ] = None
    signature: SignatureConfig | None = None
    ignore_unsigned_files: Annotated[
        bool, Meta(description="Files that are not signed are no reason to refuse the model; they are not loaded.")
    ] = False


EvidenceKind = Literal["equivalence", "golden", "replay"]


class RegistryConfig(Section, frozen=True, kw_only=True):
    """What the versions of models need on their way to production."""

    verify: Annotated[
        VerifyConfig | None,
        Meta(
            description="The signature of the files. enforce: a version needs one that holds, from the stage verified "
            "on. warn: one that holds is recorded, and none is needed. The digest is always compared."
        ),
    ] = None

    evidence: Annotated[
        tuple[EvidenceKind, ...],
        Meta(
            description="Reports that a version needs before it is validated, beside the digest of its files and the "
            "comparison of its contract: equivalence, golden, replay."
        ),
    ] = ()
    four_eyes: Annotated[
        bool, Meta(description="Whether another user or key than the one that registered a version has to approve it.")
    ] = False
    require_approval: Annotated[
        bool,
        Meta(
            description="Whether a source such as registry:churn@3 serves only versions that were approved. Rejected "
            "versions are never served."
        ),
    ] = False


DriftStream = Literal[
    "input_tokens",
    "output_tokens",
    "finish_reason",
    "refusal",
    "calls",
    "rows",
    "input",
    "missing",
    "label",
    "score",
    "output",
    "embedding",
]
"""A stream that may be watched. A model has those of its kind."""


class DriftConfig(Section, frozen=True, kw_only=True):
    """Whether requests and answers are still like earlier ones. Off by default.

    A reference is taken from the first requests, and windows of later ones are compared with it. Only counts are kept.
    """

    enabled: Annotated[
        bool,
        Meta(description="Watch the model. A change of this setting replaces its workers; the others do not."),
    ] = False
    first: Annotated[
        int,
        Meta(description="The reference is taken from so many requests, the first without one.", ge=1000, le=1_000_000),
    ] = 10_000
    reference: Annotated[
        str | None,
        Meta(description="File of a reference, written by `inferd drift save`. Unset: it is taken from requests."),
    ] = None
    window: Annotated[
        int,
        Meta(
            description=(
                "Requests of the smallest window that is compared; there are windows of 4 and 16 times as many, too."
            ),
            ge=100,
            le=1_000_000,
        ),
    ] = 1000
    false_alarm_days: Annotated[
        float,
        Meta(
            description="At most one false alarm of the model in so many days, on average, at each server.",
            gt=0,
            le=36_500,
        ),
    ] = 30.0
    min_psi: Annotated[
        float,
        Meta(
            description=(
                "A change whose population stability index is smaller is no alarm. 0: any change is. It does not hold "
                "for the stream embedding, which has no such index."
            ),
            ge=0,
        ),
    ] = 0.0
    watch: Annotated[
        tuple[DriftStream, ...], Meta(description="The streams that are watched. Empty: all that the model has.")
    ] = ()
