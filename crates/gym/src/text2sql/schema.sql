-- A coffee roastery that sells to cafes, shops, offices and people. Money is in crowns; dates are YYYY-MM-DD.

CREATE TABLE regions (
  region_id INTEGER PRIMARY KEY,
  name TEXT NOT NULL,
  country TEXT NOT NULL
);

CREATE TABLE employees (
  employee_id INTEGER PRIMARY KEY,
  name TEXT NOT NULL,
  title TEXT NOT NULL, -- Director, Regional manager, Sales, Roaster, Warehouse or Support
  manager_id INTEGER REFERENCES employees, -- null for the director
  region_id INTEGER REFERENCES regions, -- null for staff of the head office
  hired_on TEXT NOT NULL,
  salary INTEGER NOT NULL -- crowns a month
);

CREATE TABLE customers (
  customer_id INTEGER PRIMARY KEY,
  name TEXT NOT NULL,
  kind TEXT NOT NULL, -- cafe, shop, office or person
  region_id INTEGER NOT NULL REFERENCES regions,
  joined_on TEXT NOT NULL, -- the loyalty programme, often after the first order
  credit_limit INTEGER -- null: pays in advance
);

CREATE TABLE suppliers (
  supplier_id INTEGER PRIMARY KEY,
  name TEXT NOT NULL,
  country TEXT NOT NULL,
  rating INTEGER -- 1 to 5; null: not rated yet
);

CREATE TABLE categories (
  category_id INTEGER PRIMARY KEY,
  name TEXT NOT NULL
);

CREATE TABLE products (
  product_id INTEGER PRIMARY KEY,
  name TEXT NOT NULL,
  category_id INTEGER NOT NULL REFERENCES categories,
  supplier_id INTEGER NOT NULL REFERENCES suppliers,
  price REAL NOT NULL, -- list price today
  cost REAL NOT NULL, -- what the supplier asks
  weight_g INTEGER NOT NULL,
  active INTEGER NOT NULL -- 1: on sale, 0: no longer sold
);

CREATE TABLE orders (
  order_id INTEGER PRIMARY KEY,
  customer_id INTEGER NOT NULL REFERENCES customers,
  employee_id INTEGER REFERENCES employees, -- who took the order; null: ordered online
  ordered_on TEXT NOT NULL,
  status TEXT NOT NULL -- placed, shipped, delivered or cancelled
);

CREATE TABLE order_items (
  order_id INTEGER NOT NULL REFERENCES orders,
  product_id INTEGER NOT NULL REFERENCES products,
  quantity INTEGER NOT NULL,
  unit_price REAL NOT NULL, -- list price on the day of the order
  discount REAL NOT NULL, -- share of the price, 0 to 1
  PRIMARY KEY (order_id, product_id)
);

CREATE TABLE payments (
  payment_id INTEGER PRIMARY KEY,
  order_id INTEGER NOT NULL REFERENCES orders, -- an order may be paid in parts
  paid_on TEXT NOT NULL,
  amount REAL NOT NULL,
  method TEXT NOT NULL -- card, transfer, invoice or cash
);

CREATE TABLE shipments (
  shipment_id INTEGER PRIMARY KEY,
  order_id INTEGER NOT NULL REFERENCES orders,
  carrier TEXT NOT NULL,
  shipped_on TEXT NOT NULL,
  delivered_on TEXT -- null: on the way
);

CREATE TABLE returns (
  return_id INTEGER PRIMARY KEY,
  order_id INTEGER NOT NULL REFERENCES orders,
  product_id INTEGER NOT NULL REFERENCES products,
  quantity INTEGER NOT NULL,
  returned_on TEXT NOT NULL,
  reason TEXT NOT NULL -- damaged, wrong item, late, not needed or taste
);
