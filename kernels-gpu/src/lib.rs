//! Every kernel of Ferrokv and the arithmetic that host and device share.
