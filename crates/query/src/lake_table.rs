//! One table of the lake as the engine sees it: a list of Parquet files with the values of their partition columns.
//!
//! The files come from the snapshot, never from listing folders, so what is not committed is not seen. Partition columns are not in the
//! files (Delta leaves them out); they are put back here, in the place the schema gives them.

use std::fmt;
use std::sync::Arc;

use arrow_array::{ArrayRef, BooleanArray, RecordBatch, StringArray};
use arrow_schema::{Field, Schema, SchemaRef};
use async_trait::async_trait;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::{DFSchema, Result, ScalarValue, project_schema};
use datafusion::datasource::listing::{ListingTableUrl, PartitionedFile};
use datafusion::datasource::physical_plan::{FileGroup, FileScanConfigBuilder, ParquetSource};
use datafusion::datasource::source::DataSourceExec;
use datafusion::datasource::table_schema::TableSchema;
use datafusion::datasource::{TableType, create_ordering};
use datafusion::execution::object_store::ObjectStoreUrl;
use datafusion::logical_expr::{Expr, TableProviderFilterPushDown};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::empty::EmptyExec;
use datafusion::prelude::col;
use drillyard_lake::DataFile;
use drillyard_schema::Table;

pub(crate) struct LakeTable {
    table: Table,
    /// Columns in the order of the table's schema.
    schema: SchemaRef,
    /// The engine's order: file columns, then partition columns.
    file_order: TableSchema,
    files: Vec<DataFile>,
}

impl LakeTable {
    pub(crate) fn new(table: Table, files: &[DataFile]) -> Self {
        let schema = table.schema();
        let (partition, file): (Vec<_>, Vec<_>) = schema
            .fields()
            .iter()
            .cloned()
            .partition(|field| is_partition(table, field));
        let file_order = TableSchema::builder(Arc::new(Schema::new(file)))
            .with_table_partition_cols(partition)
            .build();
        Self {
            table,
            schema,
            file_order,
            files: files.to_vec(),
        }
    }

    pub(crate) fn files(&self) -> &[DataFile] {
        &self.files
    }

    /// The files whose partition values pass all filters.
    fn pruned(&self, state: &dyn Session, filters: &[Expr]) -> Result<Vec<&DataFile>> {
        let filters: Vec<_> = filters.iter().filter(|f| self.on_partitions(f)).collect();
        if filters.is_empty() || self.files.is_empty() {
            return Ok(self.files.iter().collect());
        }
        let fields: Vec<Field> = self
            .file_order
            .table_partition_cols()
            .iter()
            .map(|f| f.as_ref().clone())
            .collect();
        let columns: Vec<ArrayRef> = fields
            .iter()
            .map(|field| {
                let values: StringArray = self
                    .files
                    .iter()
                    .map(|f| partition_value(f, field.name()))
                    .collect();
                Arc::new(values) as ArrayRef
            })
            .collect();
        let nullable: Vec<Field> = fields.into_iter().map(|f| f.with_nullable(true)).collect();
        let schema = Arc::new(Schema::new(nullable));
        let batch = RecordBatch::try_new(Arc::clone(&schema), columns)?;
        let df_schema = DFSchema::try_from(schema)?;
        let mut keep = vec![true; self.files.len()];
        for filter in filters {
            let expr = state.create_physical_expr(filter.clone(), &df_schema)?;
            let passed = expr.evaluate(&batch)?.into_array(batch.num_rows())?;
            let passed = passed.as_any().downcast_ref::<BooleanArray>();
            for (index, kept) in keep.iter_mut().enumerate() {
                *kept &= passed.is_none_or(|p| {
                    use arrow_array::Array;
                    p.is_valid(index) && p.value(index)
                });
            }
        }
        let kept = self.files.iter().zip(keep).filter(|(_, keep)| *keep);
        Ok(kept.map(|(file, _)| file).collect())
    }

    fn on_partitions(&self, filter: &Expr) -> bool {
        let columns = filter.column_refs();
        !columns.is_empty()
            && !filter.is_volatile()
            && columns
                .iter()
                .all(|c| self.table.partition_columns().contains(&c.name.as_str()))
    }

    fn partitioned_file(&self, file: &DataFile) -> Result<PartitionedFile> {
        let url = ListingTableUrl::parse(file.path.as_str())?;
        let size = u64::try_from(file.bytes).unwrap_or_default();
        let mut out = PartitionedFile::new(file.path.as_str(), size);
        out.object_meta.location = url.prefix().clone();
        out.partition_values = self
            .file_order
            .table_partition_cols()
            .iter()
            .map(|field| ScalarValue::Utf8(partition_value(file, field.name()).map(str::to_owned)))
            .collect();
        Ok(out)
    }

    /// The declared sort columns up to the first that may be null: where nulls stand is not declared.
    fn sort_columns(&self) -> Vec<&'static str> {
        let not_null = |name: &&&str| {
            self.schema
                .field_with_name(name)
                .is_ok_and(|f| !f.is_nullable())
        };
        self.table
            .sort_columns()
            .iter()
            .take_while(not_null)
            .copied()
            .collect()
    }
}

fn is_partition(table: Table, field: &Field) -> bool {
    table.partition_columns().contains(&field.name().as_str())
}

fn partition_value<'a>(file: &'a DataFile, column: &str) -> Option<&'a str> {
    file.partition
        .iter()
        .find(|(name, _)| name == column)
        .map(|(_, value)| value.as_str())
}

impl fmt::Debug for LakeTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "LakeTable({}, {} files)",
            self.table.name(),
            self.files.len()
        )
    }
}

#[async_trait]
impl TableProvider for LakeTable {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    fn supports_filters_pushdown(
        &self,
        filters: &[&Expr],
    ) -> Result<Vec<TableProviderFilterPushDown>> {
        // Filters on other columns stay above the scan; the physical optimiser hands them to the Parquet reader for skipping.
        Ok(filters
            .iter()
            .map(|filter| {
                if self.on_partitions(filter) {
                    TableProviderFilterPushDown::Exact
                } else {
                    TableProviderFilterPushDown::Unsupported
                }
            })
            .collect())
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let files = self.pruned(state, filters)?;
        if files.is_empty() {
            let projected = project_schema(&self.schema, projection)?;
            return Ok(Arc::new(EmptyExec::new(projected)));
        }
        let all: Vec<usize> = (0..self.schema.fields().len()).collect();
        let engine_schema = self.file_order.table_schema();
        let indices = projection
            .unwrap_or(&all)
            .iter()
            .map(|index| engine_schema.index_of(self.schema.field(*index).name()))
            .collect::<std::result::Result<Vec<_>, _>>()?;
        let partitioned = files
            .into_iter()
            .map(|file| self.partitioned_file(file))
            .collect::<Result<Vec<_>>>()?;
        let groups = FileGroup::new(partitioned).split_files(state.config().target_partitions());
        let sort: Vec<_> = self
            .sort_columns()
            .into_iter()
            .map(|name| col(name).sort(true, false))
            .collect();
        let ordering = if sort.is_empty() {
            Vec::new()
        } else {
            create_ordering(engine_schema, &[sort])?
        };
        let source = Arc::new(ParquetSource::new(self.file_order.clone()));
        let config = FileScanConfigBuilder::new(ObjectStoreUrl::local_filesystem(), source)
            .with_file_groups(groups)
            .with_projection_indices(Some(indices))?
            .with_limit(limit)
            .with_output_ordering(ordering)
            .build();
        Ok(DataSourceExec::from_data_source(config))
    }
}
