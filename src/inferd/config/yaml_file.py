"""A YAML file as plain data. Does not know its meaning."""

from __future__ import annotations

from pathlib import Path

from inferd.errors import ConfigError


def read_yaml(path: Path, kind: str = "configuration", begins: str = "'models:' or 'server:'") -> dict[str, object]:
    """A YAML file's document as plain data; duplicate keys are refused. A date is text, as no field is a date. Raises
    ConfigError. ``kind``: what the file is; ``begins``: what its first line may be."""
    import yaml  # a server without a config file starts faster without it

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {
            first: [one for one in resolvers if one[0] != "tag:yaml.org,2002:timestamp"]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    def mapping(loader: Loader, node: yaml.MappingNode) -> dict[str, object]:
        seen: dict[object, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # "<<", which construct_mapping follows
            key, line = loader.construct_object(key_node), key_node.start_mark.line + 1
            if isinstance(key, list | dict):
                raise ConfigError(f"{path}, line {line}: a key must be a word, not a list or a section.")
            if key in seen:
                raise ConfigError(
                    f"{path}, line {line}: the key {key!r} is already given on line {seen[key]}; keep one of them."
                )
            seen[key] = line
        return {str(key): value for key, value in loader.construct_mapping(node, deep=True).items()}

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        with path.open("rb") as file:
            document: object = yaml.load(file, Loader)
    except FileNotFoundError:
        raise ConfigError(f"The {kind} file {path} does not exist; check the path.") from None
    except OSError as error:
        said = error.strerror or str(error)
        raise ConfigError(
            f"The {kind} file {path} cannot be read ({said}); check the path and its permissions."
        ) from None
    except UnicodeError as error:
        raise ConfigError(f"The {kind} file {path} is not UTF-8 text: {error}.") from None
    except RecursionError:
        raise ConfigError(f"The {kind} file {path} is nested too deeply to be one.") from None
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"The {kind} file {path} is not valid YAML: {said}.") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"The {kind} file {path} holds no sections; it starts with {begins}.")
    return document
