"""What dense and language models cost, and the tables of measurements that pages show."""
