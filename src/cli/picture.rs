//! Pictures as SVG and PNG: files, fonts and colours.

use super::failure::Failure;
use host::tensor_file::Target;
use plotters::coord::Shift;
use plotters::prelude::*;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Type size of labels.
pub const TEXT: i32 = 17;
/// What text and axes are drawn with.
pub const INK: RGBColor = RGBColor(40, 40, 40);
/// Lines of a grid.
pub const GRID: RGBColor = RGBColor(228, 228, 228);

/// Colours that everybody can tell from one another (Okabe and Ito's), by line.
pub fn colour(line: usize) -> RGBColor {
    const COLOURS: [RGBColor; 7] = [
        RGBColor(90, 90, 90),
        RGBColor(0, 114, 178),
        RGBColor(230, 159, 0),
        RGBColor(0, 158, 115),
        RGBColor(213, 94, 0),
        RGBColor(204, 121, 167),
        RGBColor(86, 180, 233),
    ];
    COLOURS[line % COLOURS.len()]
}

/// Type of this size.
pub fn ink(size: i32) -> TextStyle<'static> {
    TextStyle::from(("sans-serif", size)).color(&INK)
}

/// What drawing gives.
pub type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Something that can be drawn.
pub trait Drawing {
    /// Pixels.
    fn size(&self) -> (u32, u32);

    /// Draws it on white.
    ///
    /// # Errors
    /// What the library reports.
    fn draw<B: DrawingBackend>(&self, root: &DrawingArea<B, Shift>) -> Outcome
    where
        B::ErrorType: 'static;
}

/// A picture's files.
pub struct Picture {
    svg: Target,
    png: Target,
}

impl Picture {
    /// PREFIX.svg and PREFIX.png, checked before any work is done.
    ///
    /// # Errors
    /// A folder that is not there, a path that is no file, or the command's input.
    pub fn new(prefix: &Path, input: Option<&Path>) -> Result<Picture, Failure> {
        let target = |extension: &str| {
            let mut path = OsString::from(prefix);
            path.push(extension);
            Target::new(Path::new(&path), true, input)
        };
        Ok(Picture { svg: target(".svg")?, png: target(".png")? })
    }

    /// Draws and writes both.
    ///
    /// # Errors
    /// What cannot be drawn or written.
    pub fn write(&self, drawing: &impl Drawing) -> Result<(), Failure> {
        let failed = |target: &Target, reason: String| Failure::Plot {
            path: target.path().display().to_string(),
            reason,
        };
        let svg = svg(drawing).map_err(|error| failed(&self.svg, error.to_string()))?;
        self.svg.write(svg.as_bytes())?;
        let png = png(drawing).map_err(|error| failed(&self.png, error.to_string()))?;
        Ok(self.png.write(&png)?)
    }
}

/// A picture's only file, SVG or PNG by its name.
pub struct Sheet {
    target: Target,
    png: bool,
}

impl Sheet {
    /// The file, which is replaced if it exists, checked before any work is done.
    ///
    /// # Errors
    /// Another name, a folder that is not there, a path that is no file, or one of the command's inputs.
    pub fn new(path: &Path, inputs: &[PathBuf]) -> Result<Sheet, Failure> {
        let png = match path.extension().and_then(|extension| extension.to_str()) {
            Some("svg") => false,
            Some("png") => true,
            _ => return Err(Failure::PictureName { path: path.display().to_string() }),
        };
        for input in inputs {
            Target::new(path, true, Some(input))?;
        }
        Ok(Sheet { target: Target::new(path, true, None)?, png })
    }

    /// Draws and writes it.
    ///
    /// # Errors
    /// What cannot be drawn or written.
    pub fn write(&self, drawing: &impl Drawing) -> Result<(), Failure> {
        let drawn = if self.png { png(drawing) } else { svg(drawing).map(String::into_bytes) };
        let failed = |error: Box<dyn std::error::Error>| Failure::Plot {
            path: self.target.path().display().to_string(),
            reason: error.to_string(),
        };
        Ok(self.target.write(&drawn.map_err(failed)?)?)
    }
}

/// A picture as SVG.
///
/// # Errors
/// What the library reports.
pub fn svg(drawing: &impl Drawing) -> Result<String, Box<dyn std::error::Error>> {
    let mut text = String::new();
    on_white(SVGBackend::with_string(&mut text, drawing.size()).into_drawing_area(), drawing)?;
    Ok(text)
}

/// A picture as PNG.
///
/// # Errors
/// What the libraries report.
pub fn png(drawing: &impl Drawing) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    const CHANNELS: usize = 3;
    let (width, height) = drawing.size();
    let mut pixels = vec![0; CHANNELS * width as usize * height as usize];
    on_white(BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area(), drawing)?;
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header()?.write_image_data(&pixels)?;
    Ok(file)
}

fn on_white<B: DrawingBackend>(root: DrawingArea<B, Shift>, drawing: &impl Drawing) -> Outcome
where
    B::ErrorType: 'static,
{
    // A font of our own, so that a machine without any draws the same picture.
    plotters::style::register_font("sans-serif", FontStyle::Normal, dejavu::sans::regular())
        .map_err(|_| "the font is broken")?;
    root.fill(&WHITE)?;
    drawing.draw(&root)?;
    root.present()?;
    Ok(())
}
