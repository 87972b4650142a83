//! A Hugging Face chat template: Jinja, with the settings, filters and functions that `transformers` gives it.

use std::fmt::Write as _;

use camino::Utf8Path;
use drillyard_schema::ids::derive_id;
use drillyard_schema::{Message, ToolSpec};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::{Map, Value as Json, json};

use crate::RenderError;

/// The file a template is read from; older checkpoints keep it in `tokenizer_config.json`.
pub const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The file that names the special tokens.
pub const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";

const NAME: &str = "chat";

/// Messages to text.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token`, `eos_token`, … with their texts.
    tokens: Map<String, Json>,
    hash: String,
}

impl ChatTemplate {
    /// Reads the template and the special tokens of a checkpoint folder.
    pub fn load(dir: &Utf8Path) -> Result<Self, RenderError> {
        let config_path = dir.join(TOKENIZER_CONFIG_FILE);
        let template_path = dir.join(TEMPLATE_FILE);
        let config: Json = if config_path.exists() {
            let text = fs_err::read_to_string(&config_path)?;
            serde_json::from_str(&text).map_err(|error| RenderError::File {
                path: config_path.clone(),
                message: error.to_string(),
            })?
        } else {
            Json::Null
        };
        let source = if template_path.exists() {
            fs_err::read_to_string(&template_path)?
        } else {
            template_of_config(&config).ok_or_else(|| RenderError::File {
                path: template_path,
                message: format!("no such file, and {TOKENIZER_CONFIG_FILE} has no chat_template: a chat model needs one of them"),
            })?
        };
        Self::new(&source, &config)
    }

    /// A template from its source and the content of a `tokenizer_config.json` (null where there is none).
    pub fn new(source: &str, tokenizer_config: &Json) -> Result<Self, RenderError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| RenderError::Template(describe(&error)))?;
        environment.set_syntax(syntax);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<Value, Error> {
                Err(Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_function("strftime_now", |format: String| -> Result<String, Error> {
            let mut text = String::new();
            write!(text, "{}", chrono::Local::now().format(&format)).map_err(|_| {
                Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now: bad format '{format}'"),
                )
            })?;
            Ok(text)
        });
        environment
            .add_template_owned(NAME, without_generation_marks(source))
            .map_err(|error| RenderError::Template(describe(&error)))?;
        let tokens = tokenizer_config
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(name, _)| name.ends_with("_token"))
            .filter_map(|(name, token)| {
                let text = token.as_str().or_else(|| token["content"].as_str())?;
                Some((name.clone(), json!(text)))
            })
            .collect();
        Ok(Self {
            environment,
            tokens,
            hash: derive_id(&["chat template", source], 32),
        })
    }

    /// The text of a conversation; with `add_generation_prompt`, up to where the assistant's next turn begins.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
        add_generation_prompt: bool,
    ) -> Result<String, RenderError> {
        let messages: Vec<Json> = messages
            .iter()
            .map(template_message)
            .collect::<Result<_, _>>()
            .map_err(|error: serde_json::Error| RenderError::Template(error.to_string()))?;
        let mut context = self.tokens.clone();
        context.insert("messages".into(), messages.into());
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        let tools = match tools {
            [] => Json::Null,
            some => some.iter().map(ToolSpec::to_openai).collect(),
        };
        context.insert("tools".into(), tools);
        context.insert("documents".into(), Json::Null);
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(Serde(&context)))
            .map_err(|error| RenderError::Template(describe(&error)))
    }

    /// The text of the token that ends a turn, where `tokenizer_config.json` names one.
    pub fn eos_token(&self) -> Option<&str> {
        self.tokens.get("eos_token").and_then(Json::as_str)
    }

    /// 32 hexadecimal digits over the template's source.
    pub fn hash(&self) -> &str {
        &self.hash
    }
}

/// A message as templates expect it: arguments as an object, not as JSON text.
fn template_message(message: &Message) -> Result<Json, serde_json::Error> {
    let mut value = serde_json::to_value(message)?;
    for call in value["tool_calls"].as_array_mut().into_iter().flatten() {
        let arguments = &mut call["function"]["arguments"];
        let parsed = arguments.as_str().map(serde_json::from_str::<Json>);
        if let Some(Ok(object @ Json::Object(_))) = parsed {
            *arguments = object;
        }
    }
    Ok(value)
}

/// `chat_template` of a `tokenizer_config.json`: one text, or several with names.
fn template_of_config(config: &Json) -> Option<String> {
    let named = |wanted: &str| {
        let all = config["chat_template"].as_array()?;
        let found = all.iter().find(|t| t["name"] == wanted)?;
        found["template"].as_str()
    };
    config["chat_template"]
        .as_str()
        .or_else(|| named("tool_use"))
        .or_else(|| named("default"))
        .map(str::to_owned)
}

/// `{% generation %}` marks the assistant's text for `transformers`; it renders its body, which is all that matters here.
fn without_generation_marks(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else {
            break;
        };
        let tag = &rest[start..start + length];
        let word = tag[2..].trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        result.push_str(&rest[..start]);
        result.push_str(&match word {
            "generation" => tag.replacen("generation", "if true", 1),
            "endgeneration" => tag.replacen("endgeneration", "endif", 1),
            _ => tag.to_owned(),
        });
        rest = &rest[start + length..];
    }
    result.push_str(rest);
    result
}

fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let _ = write!(text, ": {cause}");
        source = cause.source();
    }
    text
}

/// `tojson` as `transformers` defines it: Python's `json.dumps`, no HTML escapes.
#[expect(clippy::needless_pass_by_value, reason = "the signature of a filter")]
fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let json = serde_json::to_value(value)
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("tojson: {e}")))?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: separators must be two texts",
            ));
        }
        None if indent.is_some() => (",", ": "),
        None => (", ", ": "),
    };
    let mut dump = Dump {
        out: String::new(),
        item,
        key,
        indent,
        ascii: ascii.unwrap_or(false),
        sort: sort.unwrap_or(false),
    };
    dump.value(&json, 0);
    Ok(Value::from_safe_string(dump.out))
}

struct Dump<'a> {
    out: String,
    item: &'a str,
    key: &'a str,
    indent: Option<usize>,
    ascii: bool,
    sort: bool,
}

impl Dump<'_> {
    fn value(&mut self, value: &Json, depth: usize) {
        match value {
            Json::Array(items) if !items.is_empty() => {
                self.out.push('[');
                for (i, item) in items.iter().enumerate() {
                    self.before(i, depth + 1);
                    self.value(item, depth + 1);
                }
                self.line(depth);
                self.out.push(']');
            }
            Json::Object(members) if !members.is_empty() => {
                self.out.push('{');
                let mut members: Vec<_> = members.iter().collect();
                if self.sort {
                    members.sort_by_key(|(name, _)| *name);
                }
                for (i, (name, member)) in members.into_iter().enumerate() {
                    self.before(i, depth + 1);
                    self.scalar(&json!(name));
                    self.out.push_str(self.key);
                    self.value(member, depth + 1);
                }
                self.line(depth);
                self.out.push('}');
            }
            other => self.scalar(other),
        }
    }

    fn before(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.out.push_str(self.item);
        }
        self.line(depth);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn scalar(&mut self, value: &Json) {
        for character in value.to_string().chars() {
            if self.ascii && !character.is_ascii() {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    let _ = write!(self.out, "\\u{unit:04x}");
                }
            } else {
                self.out.push(character);
            }
        }
    }
}
