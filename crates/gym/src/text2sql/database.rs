//! The database of `text2sql`: a coffee roastery, eleven related tables, about ten thousand rows, always the same.
//!
//! It holds what makes questions worth asking: customers without orders, products never sold, orders taken online (no employee),
//! cancelled orders, orders paid in parts or not at all, unrated suppliers, repeated names.

use std::sync::{Arc, LazyLock};

use rusqlite::{Connection, params};

use crate::draw::Draw;

/// The name of the asset, and of the file in the work directory.
pub(crate) const ASSET: &str = "data.db";

const SCHEMA: &str = include_str!("schema.sql");
/// Orders run over these many days from 2023-01-01: two years.
const DAYS: i64 = 731;
const CUSTOMERS: i64 = 260;
const PRODUCTS: i64 = 84;
const ORDERS: i64 = 2_000;
const SUPPLIERS: i64 = 24;

const REGIONS: [(&str, &str); 8] = [
    ("North Coast", "Norland"),
    ("Lake District", "Norland"),
    ("Old Town", "Norland"),
    ("Harbour", "Sudmark"),
    ("Hill Country", "Sudmark"),
    ("South Plain", "Sudmark"),
    ("East Valley", "Ostia"),
    ("West Bank", "Ostia"),
];
const CATEGORIES: [(&str, i64, i64, i64); 9] = [
    // name, lowest and highest price in hundredths of a crown, typical weight in grams
    ("Espresso beans", 900, 2_400, 1_000),
    ("Filter beans", 800, 2_800, 500),
    ("Decaf", 850, 2_000, 500),
    ("Tea", 400, 1_500, 100),
    ("Syrups", 500, 1_200, 700),
    ("Machines", 14_900, 249_900, 9_000),
    ("Grinders", 4_900, 89_900, 3_000),
    ("Cups", 300, 1_900, 250),
    ("Cleaning", 350, 1_800, 400),
];
const FIRST: [&str; 24] = [
    "Ada", "Bela", "Cora", "Dario", "Edda", "Finn", "Greta", "Hugo", "Ines", "Jonas", "Kira",
    "Lars", "Mona", "Nils", "Olga", "Pavel", "Rita", "Sven", "Tilda", "Uwe", "Vera", "Wim", "Yara",
    "Zeno",
];
const LAST: [&str; 20] = [
    "Abel", "Brandt", "Castel", "Dorn", "Ekman", "Falk", "Grau", "Holm", "Iversen", "Jansen",
    "Keller", "Lund", "Moser", "Nagy", "Ost", "Prager", "Quist", "Roth", "Sander", "Tamm",
];
const PLACES: [&str; 18] = [
    "Mill", "Bridge", "Garden", "Station", "Market", "Tower", "River", "Corner", "Castle",
    "Meadow", "Island", "Library", "Museum", "Park", "Square", "Sunny", "Golden", "Little",
];
const BLENDS: [&str; 20] = [
    "Dawn", "Dusk", "Comet", "Anchor", "Velvet", "Summit", "Harvest", "Ember", "Lantern", "Cedar",
    "Aurora", "Compass", "Drift", "Echo", "Fable", "Grove", "Haven", "Indigo", "Juniper",
    "Kestrel",
];
const COUNTRIES: [&str; 7] = [
    "Brazil", "Colombia", "Ethiopia", "Germany", "India", "Italy", "Kenya",
];
const CARRIERS: [&str; 3] = ["Swift Post", "Blue Van", "Parcel Owl"];
const METHODS: [&str; 4] = ["card", "transfer", "invoice", "cash"];
const REASONS: [&str; 5] = ["damaged", "wrong item", "late", "not needed", "taste"];

static BYTES: LazyLock<Result<Arc<[u8]>, String>> = LazyLock::new(|| {
    build()
        .and_then(|mut connection| Ok(Arc::from(&*connection.serialize("main")?)))
        .map_err(|error| error.to_string())
});

/// The database file, built on first use.
pub(crate) fn bytes() -> Result<Arc<[u8]>, String> {
    BYTES.clone()
}

/// Days since 2023-01-01 as `YYYY-MM-DD`.
fn date(days: i64) -> String {
    const MONTHS: [i64; 12] = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    // Counted from 2015, the year before the first leap year that hire dates can meet.
    let (mut year, mut left) = (2015, days + 8 * 365 + 2);
    let leap = |year: i64| i64::from(year % 4 == 0);
    while left >= 365 + leap(year) {
        left -= 365 + leap(year);
        year += 1;
    }
    let mut month = 0;
    loop {
        let length = MONTHS[month] + if month == 1 { leap(year) } else { 0 };
        if left < length {
            return format!("{year}-{:02}-{:02}", month + 1, left + 1);
        }
        left -= length;
        month += 1;
    }
}

/// Hundredths as the number that SQL stores.
fn crowns(hundredths: i64) -> f64 {
    hundredths as f64 / 100.0
}

/// The day itself, or a later one where the roastery takes no orders: on Sundays and during the holiday of August 2024.
fn open_day(day: i64) -> i64 {
    let day = if (581..595).contains(&day) {
        day + 14
    } else {
        day
    };
    // 2023-01-01 was a Sunday.
    if day % 7 == 0 { day + 1 } else { day }
}

struct Product {
    price: i64,
    active_until: i64,
}

fn build() -> rusqlite::Result<Connection> {
    let mut connection = Connection::open_in_memory()?;
    connection.execute_batch(SCHEMA)?;
    let transaction = connection.transaction()?;
    let mut draw = Draw::new(&["text2sql", "roastery", "1"]);
    people(&transaction, &mut draw)?;
    let products = goods(&transaction, &mut draw)?;
    trade(&transaction, &products, &mut draw)?;
    transaction.commit()?;
    Ok(connection)
}

fn people(db: &Connection, draw: &mut Draw) -> rusqlite::Result<()> {
    for (at, (name, country)) in REGIONS.iter().enumerate() {
        db.execute(
            "INSERT INTO regions VALUES (?, ?, ?)",
            params![at as i64 + 1, name, country],
        )?;
    }
    let mut employee = db.prepare("INSERT INTO employees VALUES (?, ?, ?, ?, ?, ?, ?)")?;
    for id in 1..=34_i64 {
        let name = format!("{} {}", draw.pick(&FIRST), draw.pick(&LAST));
        let (title, manager, region, pay) = match id {
            1 => ("Director", None, None, 9_800),
            2..=9 => ("Regional manager", Some(1), Some(id - 1), 6_200),
            10..=25 => {
                let region = 1 + (id - 10) % 8;
                ("Sales", Some(region + 1), Some(region), 4_100)
            }
            26..=29 => ("Roaster", Some(1), None, 4_400),
            30..=32 => ("Warehouse", Some(1), None, 3_300),
            _ => ("Support", Some(1), None, 3_500),
        };
        let hired = date(draw.between(-2_800, 600));
        let salary = pay + 50 * draw.between(-12, 12);
        employee.execute(params![id, name, title, manager, region, hired, salary])?;
    }
    let mut customer = db.prepare("INSERT INTO customers VALUES (?, ?, ?, ?, ?, ?)")?;
    for id in 1..=CUSTOMERS {
        let place = draw.pick(&PLACES);
        let last = draw.pick(&LAST);
        let (kind, name) = match draw.below(10) {
            0..=3 => ("cafe", format!("{place} Cafe")),
            4..=5 => ("shop", format!("{last} & Co")),
            6 => ("office", format!("{place} Office")),
            _ => ("person", format!("{} {last}", draw.pick(&FIRST))),
        };
        let credit = (kind != "person" && draw.chance(0.7)).then(|| 500 * draw.between(1, 12));
        let region = 1 + draw.below(8) as i64;
        let joined = date(draw.between(-900, DAYS - 60));
        customer.execute(params![id, name, kind, region, joined, credit])?;
    }
    Ok(())
}

fn goods(db: &Connection, draw: &mut Draw) -> rusqlite::Result<Vec<Product>> {
    let mut supplier = db.prepare("INSERT INTO suppliers VALUES (?, ?, ?, ?)")?;
    for id in 1..=SUPPLIERS {
        let name = format!(
            "{} {}",
            draw.pick(&LAST),
            draw.pick(&["Trading", "Imports", "Goods"])
        );
        let rating = draw.chance(0.8).then(|| draw.between(1, 5));
        supplier.execute(params![id, name, draw.pick(&COUNTRIES), rating])?;
    }
    let mut category = db.prepare("INSERT INTO categories VALUES (?, ?)")?;
    for (at, (name, ..)) in CATEGORIES.iter().enumerate() {
        category.execute(params![at as i64 + 1, name])?;
    }
    let mut product = db.prepare("INSERT INTO products VALUES (?, ?, ?, ?, ?, ?, ?, ?)")?;
    let mut products = Vec::new();
    for id in 1..=PRODUCTS {
        let at = ((id - 1) % 9) as usize;
        let (category, low, high, weight) = CATEGORIES[at];
        let blend = BLENDS[draw.below(BLENDS.len())];
        let short = category.split(' ').next().unwrap_or(category);
        let price = draw.between(low / 50, high / 50) * 50 - 1;
        let cost = price * draw.between(35, 75) / 100;
        let active = draw.chance(0.88);
        let weight = weight * draw.between(1, 4) / 2;
        // The last suppliers have no product.
        let supplier = draw.between(1, SUPPLIERS - 3);
        product.execute(params![
            id,
            format!("{blend} {short} {id}"),
            at as i64 + 1,
            supplier,
            crowns(price),
            crowns(cost),
            weight,
            i64::from(active),
        ])?;
        // A few products were never sold.
        let active_until = match (id % 21, active) {
            (0, _) => 0,
            (_, true) => DAYS,
            (_, false) => draw.between(120, 500),
        };
        products.push(Product {
            price,
            active_until,
        });
    }
    Ok(products)
}

fn trade(db: &Connection, products: &[Product], draw: &mut Draw) -> rusqlite::Result<()> {
    let mut order = db.prepare("INSERT INTO orders VALUES (?, ?, ?, ?, ?)")?;
    let mut item = db.prepare("INSERT INTO order_items VALUES (?, ?, ?, ?, ?)")?;
    let mut payment = db.prepare("INSERT INTO payments VALUES (?, ?, ?, ?, ?)")?;
    let mut shipment = db.prepare("INSERT INTO shipments VALUES (?, ?, ?, ?, ?)")?;
    let mut back = db.prepare("INSERT INTO returns VALUES (?, ?, ?, ?, ?, ?)")?;
    let (mut payment_id, mut shipment_id, mut return_id) = (0_i64, 0_i64, 0_i64);
    for order_id in 1..=ORDERS {
        // Orders get denser with time; the last customers never order, the first ones often.
        let day =
            (order_id - 1) * DAYS / ORDERS + draw.between(0, 9) * i64::from(order_id % 3 == 0);
        let day = open_day(day.min(DAYS - 1));
        let customer = 1 + draw.below(draw.clone().below(CUSTOMERS as usize - 25) + 1) as i64;
        let employee = draw.chance(0.6).then(|| draw.between(10, 24));
        let status = match draw.below(20) {
            0..=1 => "cancelled",
            2 => "placed",
            3..=4 => "shipped",
            _ => "delivered",
        };
        order.execute(params![order_id, customer, employee, date(day), status])?;

        let mut total = 0.0;
        let mut chosen = Vec::new();
        for _ in 0..=draw.below(5) {
            let at = draw.below(products.len());
            if products[at].active_until <= day || chosen.contains(&at) {
                continue;
            }
            chosen.push(at);
        }
        if chosen.is_empty() {
            chosen.push(0);
        }
        for &at in &chosen {
            let list = products[at].price;
            let unit = if day < 365 { list * 94 / 100 } else { list };
            let dear = list > 10_000;
            let quantity = if dear {
                1 + draw.below(2) as i64
            } else {
                draw.between(1, 24)
            };
            let discount = crowns(*draw.pick(&[0, 0, 0, 0, 5, 10, 15, 20]));
            total += quantity as f64 * crowns(unit) * (1.0 - discount);
            item.execute(params![
                order_id,
                at as i64 + 1,
                quantity,
                crowns(unit),
                discount
            ])?;
        }
        let total = (total * 100.0).round() as i64;

        if status != "cancelled" && draw.chance(0.93) {
            let parts = if draw.chance(0.2) { 2 } else { 1 };
            for part in 0..parts {
                // The second part of some orders is still open.
                if part == 1 && draw.chance(0.3) {
                    break;
                }
                payment_id += 1;
                let amount = if part == 0 && parts == 2 {
                    total / 2
                } else {
                    total - (parts - 1) * (total / 2)
                };
                let paid = date((day + draw.between(0, 30) + 20 * part).min(DAYS + 40));
                payment.execute(params![
                    payment_id,
                    order_id,
                    paid,
                    crowns(amount),
                    draw.pick(&METHODS)
                ])?;
            }
        }
        if matches!(status, "shipped" | "delivered") {
            shipment_id += 1;
            let shipped = day + draw.between(0, 5);
            let arrived = (status == "delivered").then(|| date(shipped + draw.between(1, 9)));
            shipment.execute(params![
                shipment_id,
                order_id,
                draw.pick(&CARRIERS),
                date(shipped),
                arrived
            ])?;
        }
        if status == "delivered" && draw.chance(0.14) {
            return_id += 1;
            let at = *draw.pick(&chosen);
            let when = date(day + draw.between(6, 40));
            back.execute(params![
                return_id,
                order_id,
                at as i64 + 1,
                1,
                when,
                draw.pick(&REASONS)
            ])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), "2023-01-01");
        assert_eq!(date(364), "2023-12-31");
        assert_eq!(date(365 + 59), "2024-02-29");
        assert_eq!(date(730), "2024-12-31");
        assert_eq!(date(731), "2025-01-01");
        assert_eq!(date(-1), "2022-12-31");
        assert_eq!(date(-2_800), "2015-05-03");
    }

    #[test]
    fn the_database_is_large_related_and_always_the_same() {
        let one = build().unwrap();
        let tables: Vec<String> = one
            .prepare("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
            .unwrap()
            .query_map([], |row| row.get(0))
            .unwrap()
            .collect::<Result<_, _>>()
            .unwrap();
        assert!(tables.len() >= 8, "{tables:?}");
        let rows: i64 = tables
            .iter()
            .map(|table| {
                one.query_row(&format!("SELECT COUNT(*) FROM {table}"), [], |row| {
                    row.get::<_, i64>(0)
                })
                .unwrap()
            })
            .sum();
        assert!(rows > 8_000, "{rows}");
        let broken: i64 = one
            .query_row("SELECT COUNT(*) FROM pragma_foreign_key_check", [], |row| {
                row.get(0)
            })
            .unwrap();
        assert_eq!(broken, 0);
        let bytes = |mut db: Connection| db.serialize("main").unwrap().to_vec();
        assert_eq!(bytes(one), bytes(build().unwrap()));
    }

    #[test]
    fn the_rows_are_what_they_always_were() {
        // A change here may change right answers: raise the set's version.
        let db = build().unwrap();
        let one = |sql: &str| db.query_row(sql, [], |row| row.get::<_, f64>(0)).unwrap();
        let revenue =
            one("SELECT ROUND(SUM(quantity * unit_price * (1 - discount)), 2) FROM order_items");
        assert_eq!(format!("{revenue:.2}"), "2190997.54");
    }
}
