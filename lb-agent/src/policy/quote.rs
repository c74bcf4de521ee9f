//! Go's `%q`: the texts of problems quote user input as the Go agent does, which is not how Rust's `{:?}` does.

use std::fmt::{self, Write as _};
use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory as _};

/// Displays a text as Go's `strconv.Quote` writes it: a double-quoted Go string.
#[derive(Clone, Copy, Debug)]
pub struct Quoted<'a>(pub &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for c in self.0.chars() {
            match c {
                '"' => f.write_str("\\\"")?,
                '\\' => f.write_str("\\\\")?,
                c if is_print(c) => f.write_char(c)?,
                '\x07' => f.write_str("\\a")?,
                '\x08' => f.write_str("\\b")?,
                '\x0c' => f.write_str("\\f")?,
                '\n' => f.write_str("\\n")?,
                '\r' => f.write_str("\\r")?,
                '\t' => f.write_str("\\t")?,
                '\x0b' => f.write_str("\\v")?,
                '\0'..' ' | '\x7f' => write!(f, "\\x{:02x}", u32::from(c))?,
                '\u{80}'..='\u{ffff}' => write!(f, "\\u{:04x}", u32::from(c))?,
                c => write!(f, "\\U{:08x}", u32::from(c))?,
            }
        }
        f.write_char('"')
    }
}

/// Go's `strconv.IsPrint`: letters, marks, numbers, punctuation, symbols and the ASCII space.
fn is_print(c: char) -> bool {
    use GeneralCategoryGroup::{Letter, Mark, Number, Punctuation, Symbol};
    c == ' ' || matches!(c.general_category_group(), Letter | Mark | Number | Punctuation | Symbol)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_as_go_does() {
        for (text, quoted) in [
            ("", r#""""#),
            ("10.0.0.1 x", r#""10.0.0.1 x""#),
            ("\"\\", r#""\"\\""#),
            ("\x07\x08\x0c\n\r\t\x0b", r#""\a\b\f\n\r\t\v""#),
            ("\0\x1f\x7f", r#""\x00\x1f\x7f""#),
            ("\u{a0}\u{200b}\u{feff}\u{2028}\u{85}", r#""\u00a0\u200b\ufeff\u2028\u0085""#),
            ("\u{e0001}", r#""\U000e0001""#),
            ("é\u{301}\u{fffd}日", "\"é\u{301}\u{fffd}日\""),
        ] {
            assert_eq!(Quoted(text).to_string(), quoted, "{text:?}");
        }
    }
}
