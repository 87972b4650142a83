//! Weights on disk: `model.safetensors`, and sharded checkpoints behind `model.safetensors.index.json`.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;

use camino::{Utf8Path, Utf8PathBuf};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use tch::{Device, Kind, Tensor};

use crate::ModelError;

/// The file weights are written to.
pub const WEIGHTS_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Reads every tensor of a checkpoint folder as f32.
pub fn load(dir: &Utf8Path, device: Device) -> Result<BTreeMap<String, Tensor>, ModelError> {
    let mut tensors = BTreeMap::new();
    for path in files(dir)? {
        let bytes = fs_err::read(&path)?;
        let broken = |source| ModelError::Safetensors {
            path: path.clone(),
            source,
        };
        for (name, view) in SafeTensors::deserialize(&bytes).map_err(broken)?.iter() {
            let kind = match view.dtype() {
                Dtype::F32 => Kind::Float,
                Dtype::F16 => Kind::Half,
                Dtype::BF16 => Kind::BFloat16,
                Dtype::F64 => Kind::Double,
                other => {
                    return Err(ModelError::Parameter {
                        name: name.to_owned(),
                        message: format!(
                            "type {other:?} is not supported; f32, f16, bf16 and f64 are"
                        ),
                    });
                }
            };
            let shape: Vec<i64> = view.shape().iter().map(|n| *n as i64).collect();
            let tensor = Tensor::f_from_data_size(view.data(), &shape, kind)?
                .to_device(device)
                .to_kind(Kind::Float);
            tensors.insert(name.to_owned(), tensor);
        }
    }
    Ok(tensors)
}

/// `model.safetensors.index.json`: which tensor lies in which file.
#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

fn files(dir: &Utf8Path) -> Result<Vec<Utf8PathBuf>, ModelError> {
    let index = dir.join(INDEX_FILE);
    if dir.join(WEIGHTS_FILE).exists() || !index.exists() {
        return Ok(vec![dir.join(WEIGHTS_FILE)]);
    }
    let text = fs_err::read_to_string(&index)?;
    let parsed: Index = serde_json::from_str(&text).map_err(|source| ModelError::Json {
        path: index,
        source,
    })?;
    let mut names: Vec<_> = parsed.weight_map.into_values().collect();
    names.sort();
    names.dedup();
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

/// Writes tensors as f32 to `dir/model.safetensors`: a reader sees the old file or the whole new one, also after a crash.
pub fn save<'a>(
    dir: &Utf8Path,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
) -> Result<(), ModelError> {
    let path = dir.join(WEIGHTS_FILE);
    let buffers = tensors
        .into_iter()
        .map(|(name, tensor)| {
            let shape: Vec<usize> = tensor.size().iter().map(|n| *n as usize).collect();
            Ok((name, shape, bytes(tensor)?))
        })
        .collect::<Result<Vec<_>, ModelError>>()?;
    let broken = |source| ModelError::Safetensors {
        path: path.clone(),
        source,
    };
    let views = buffers
        .iter()
        .map(|(name, shape, data)| Ok((*name, TensorView::new(Dtype::F32, shape.clone(), data)?)))
        .collect::<Result<Vec<_>, _>>()
        .map_err(broken)?;
    // transformers refuses files that do not say where they come from.
    let origin = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let file = serialize(views, Some(origin)).map_err(broken)?;
    write_atomically(&path, &file)
}

/// Writes a file so that a reader sees the old content or the whole new one, also after a crash.
pub(crate) fn write_atomically(path: &Utf8Path, content: &[u8]) -> Result<(), ModelError> {
    let temporary = path.with_extension(format!("{}.partial", std::process::id()));
    let write = || -> std::io::Result<()> {
        let mut file = fs_err::File::create(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs_err::rename(&temporary, path)?;
        match path.parent() {
            Some(dir) => fs_err::File::open(dir)?.sync_all(),
            None => Ok(()),
        }
    };
    write().map_err(|error| {
        // The write already failed; what matters to the caller is why.
        drop(fs_err::remove_file(&temporary));
        error.into()
    })
}

/// A BLAKE3 hash (64 hexadecimal digits) over names, shapes and f32 bytes in order of the names: equal weights have equal hashes,
/// wherever and in whatever type they are stored.
pub fn hash<'a>(
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
) -> Result<String, ModelError> {
    let sorted: BTreeMap<&str, &Tensor> = tensors.into_iter().collect();
    let mut hasher = blake3::Hasher::new();
    for (name, tensor) in sorted {
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        let shape = tensor.size();
        hasher.update(&(shape.len() as u64).to_le_bytes());
        for n in shape {
            hasher.update(&n.to_le_bytes());
        }
        hasher.update(&bytes(tensor)?);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// A tensor's numbers as little-endian f32.
fn bytes(tensor: &Tensor) -> Result<Vec<u8>, ModelError> {
    let tensor = tensor
        .detach()
        .to_device(Device::Cpu)
        .to_kind(Kind::Float)
        .contiguous();
    let count = tensor.numel();
    let mut data = vec![0; count * 4];
    tensor.f_copy_data_u8(&mut data, count)?;
    Ok(data)
}
