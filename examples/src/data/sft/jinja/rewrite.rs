//! Rewriting of a parsed template: operators become calls of functions with Python's rules.

use std::cell::RefCell;
use std::collections::BTreeSet;

use minijinja::machinery::ast::*;
use minijinja::machinery::{Span, Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Error, ErrorKind};

use super::operators as names;

/// Fails for escapes that Python and MiniJinja read differently.
pub(super) fn check_escapes(source: &str, syntax: SyntaxConfig) -> Result<(), Error> {
    for token in tokenize(source, false, syntax) {
        let (Token::String(_), span) = token? else { continue };
        let written = &source[span.start_offset as usize..span.end_offset as usize];
        let mut rest = written.chars();
        while let Some(c) = rest.next() {
            let escaped = if c == '\\' { rest.next() } else { None };
            if let Some(escaped @ ('a' | 'v' | 'N' | 'U' | '/' | '\n')) = escaped {
                let message = format!("the escape \\{escaped} in a string is not supported: write the character");
                return Err(refused_at(message, span));
            }
        }
    }
    Ok(())
}

fn refused_at(message: String, span: Span) -> Error {
    Error::new(ErrorKind::SyntaxError, format!("{message} (line {} of the template)", span.start_line))
}

fn call<'a>(name: &'static str, args: Vec<Expr<'a>>, span: Span) -> Expr<'a> {
    let expr = Expr::Var(Spanned::new(Var { id: name }, span));
    Expr::Call(Spanned::new(Call { expr, args: args.into_iter().map(CallArg::Pos).collect() }, span))
}

fn constant<'a>(value: impl Into<Value>, span: Span) -> Expr<'a> {
    Expr::Const(Spanned::new(Const { value: value.into() }, span))
}

/// Checks the nesting of a list or dict that has these items.
fn limited<'a>(made: Expr<'a>, items: &[Expr<'a>]) -> Expr<'a> {
    let span = made.span();
    match items.iter().all(|item| matches!(item, Expr::Const(_))) {
        true => made,
        false => call(names::NESTED, vec![made], span),
    }
}

/// Rewrites a parsed template.
pub(super) fn template<'a>(parsed: &Stmt<'a>) -> Result<Stmt<'a>, Error> {
    let rewriter = Rewriter::default();
    // The first pass finds the macros, which may follow their calls.
    rewriter.statement(parsed)?;
    rewriter.statement(parsed)
}

/// Makes a scope of its own for variables, as Jinja2 has for these bodies.
fn scope<'a>(body: Vec<Stmt<'a>>, span: Span) -> Vec<Stmt<'a>> {
    match body.is_empty() {
        true => body,
        false => vec![Stmt::WithBlock(Spanned::new(WithBlock { assignments: vec![], body }, span))],
    }
}

#[derive(Default)]
struct Rewriter<'a> {
    /// Names of macros with defaults.
    with_defaults: RefCell<BTreeSet<&'a str>>,
}

impl<'a> Rewriter<'a> {
    /// Rewrites a statement.
    fn statement(&self, stmt: &Stmt<'a>) -> Result<Stmt<'a>, Error> {
        let unsupported = |tag: &str, span| Err(refused_at(format!("the tag {tag} is not supported"), span));
        Ok(match stmt {
            Stmt::Template(s) => {
                Stmt::Template(Spanned::new(Template { children: self.statements(&s.children)? }, s.span()))
            }
            Stmt::EmitExpr(s) => Stmt::EmitExpr(Spanned::new(EmitExpr { expr: self.expression(&s.expr)? }, s.span())),
            Stmt::EmitRaw(s) => Stmt::EmitRaw(Spanned::new(EmitRaw { raw: s.raw }, s.span())),
            Stmt::ForLoop(s) => {
                let new = ForLoop {
                    target: self.target(&s.target)?,
                    iter: call(names::ITER, vec![self.expression(&s.iter)?], s.iter.span()),
                    filter_expr: s.filter_expr.as_ref().map(|it| self.expression(it)).transpose()?,
                    recursive: s.recursive,
                    body: self.statements(&s.body)?,
                    else_body: scope(self.statements(&s.else_body)?, s.span()),
                };
                Stmt::ForLoop(Spanned::new(new, s.span()))
            }
            Stmt::IfCond(s) => {
                let new = IfCond {
                    expr: self.expression(&s.expr)?,
                    true_body: self.statements(&s.true_body)?,
                    false_body: self.statements(&s.false_body)?,
                };
                Stmt::IfCond(Spanned::new(new, s.span()))
            }
            Stmt::WithBlock(s) => {
                let (targets, values): (Vec<_>, Vec<_>) = s.assignments.iter().map(|(to, value)| (to, value)).unzip();
                let targets = targets.into_iter().map(|it| self.target(it)).collect::<Result<Vec<_>, Error>>()?;
                let values = values.into_iter().map(|it| self.expression(it)).collect::<Result<Vec<_>, Error>>()?;
                // One assignment, because no value sees the others.
                let assignments = match targets.len() {
                    0 | 1 => targets.into_iter().zip(values).collect(),
                    _ => vec![(
                        Expr::List(Spanned::new(List { items: targets }, s.span())),
                        Expr::Tuple(Spanned::new(Tuple { items: values }, s.span())),
                    )],
                };
                let new = WithBlock { assignments, body: self.statements(&s.body)? };
                Stmt::WithBlock(Spanned::new(new, s.span()))
            }
            Stmt::Set(s) => Stmt::Set(Spanned::new(
                Set { target: self.target(&s.target)?, expr: self.expression(&s.expr)? },
                s.span(),
            )),
            Stmt::SetBlock(s) => {
                let filter = s.filter.as_ref().map(|it| self.expression(it)).transpose()?;
                let body = scope(self.statements(&s.body)?, s.span());
                let new = SetBlock { target: self.target(&s.target)?, filter, body };
                Stmt::SetBlock(Spanned::new(new, s.span()))
            }
            Stmt::FilterBlock(s) => {
                let body = scope(self.statements(&s.body)?, s.span());
                let new = FilterBlock { filter: self.expression(&s.filter)?, body };
                Stmt::FilterBlock(Spanned::new(new, s.span()))
            }
            Stmt::Macro(s) => Stmt::Macro(Spanned::new(self.macro_of(s)?, s.span())),
            Stmt::CallBlock(s) => {
                let new = CallBlock {
                    call: Spanned::new(self.call_of(&s.call)?, s.call.span()),
                    macro_decl: Spanned::new(self.macro_of(&s.macro_decl)?, s.macro_decl.span()),
                };
                Stmt::CallBlock(Spanned::new(new, s.span()))
            }
            Stmt::Continue(s) => Stmt::Continue(Spanned::new(Continue, s.span())),
            Stmt::Break(s) => Stmt::Break(Spanned::new(Break, s.span())),
            Stmt::AutoEscape(s) => return unsupported("autoescape", s.span()),
            Stmt::Block(s) => return unsupported("block", s.span()),
            Stmt::Import(s) => return unsupported("import", s.span()),
            Stmt::FromImport(s) => return unsupported("from", s.span()),
            Stmt::Extends(s) => return unsupported("extends", s.span()),
            Stmt::Include(s) => return unsupported("include", s.span()),
            Stmt::Do(s) => return unsupported("do", s.span()),
        })
    }

    fn statements(&self, all: &[Stmt<'a>]) -> Result<Vec<Stmt<'a>>, Error> {
        all.iter().map(|it| self.statement(it)).collect()
    }

    fn macro_of(&self, old: &Macro<'a>) -> Result<Macro<'a>, Error> {
        let args = old.args.iter().map(|it| self.target(it)).collect::<Result<_, Error>>()?;
        if !old.defaults.is_empty() {
            self.with_defaults.borrow_mut().insert(old.name);
        }
        Ok(Macro {
            name: old.name,
            args,
            defaults: self.expressions(&old.defaults)?,
            body: self.statements(&old.body)?,
        })
    }

    fn call_of(&self, old: &Call<'a>) -> Result<Call<'a>, Error> {
        let expr = match &old.expr {
            // The call of a method.
            Expr::GetAttr(s) => {
                if s.name == "cycle" && old.args.is_empty() {
                    return Err(refused_at("loop.cycle needs an argument".into(), s.span()));
                }
                Expr::GetAttr(Spanned::new(GetAttr { expr: self.expression(&s.expr)?, name: s.name }, s.span()))
            }
            other => self.expression(other)?,
        };
        let mut args = self.arguments(&old.args)?;
        // MiniJinja takes the default for an argument that is undefined, and Jinja2 does not.
        if let Expr::Var(name) = &old.expr
            && self.with_defaults.borrow().contains(name.id)
        {
            let given = |expr: Expr<'a>| {
                let span = expr.span();
                call(names::GIVEN, vec![constant(name.id, span), expr], span)
            };
            args = args
                .into_iter()
                .map(|argument| match argument {
                    CallArg::Pos(expr) => CallArg::Pos(given(expr)),
                    CallArg::Kwarg(name, expr) => CallArg::Kwarg(name, given(expr)),
                    splat => splat,
                })
                .collect();
        }
        Ok(Call { expr, args })
    }

    fn arguments(&self, all: &[CallArg<'a>]) -> Result<Vec<CallArg<'a>>, Error> {
        let one = |argument: &CallArg<'a>| {
            Ok(match argument {
                CallArg::Pos(expr) => CallArg::Pos(self.expression(expr)?),
                CallArg::Kwarg(name, expr) => CallArg::Kwarg(name, self.expression(expr)?),
                CallArg::PosSplat(expr) => CallArg::PosSplat(self.expression(expr)?),
                CallArg::KwargSplat(expr) => CallArg::KwargSplat(self.expression(expr)?),
            })
        };
        all.iter().map(one).collect()
    }

    fn expressions(&self, all: &[Expr<'a>]) -> Result<Vec<Expr<'a>>, Error> {
        all.iter().map(|it| self.expression(it)).collect()
    }

    /// Copies the target of an assignment.
    fn target(&self, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        let items = |all: &[Expr<'a>]| all.iter().map(|it| self.target(it)).collect::<Result<Vec<_>, Error>>();
        Ok(match expr {
            Expr::List(s) => Expr::List(Spanned::new(List { items: items(&s.items)? }, s.span())),
            Expr::Tuple(s) => Expr::Tuple(Spanned::new(Tuple { items: items(&s.items)? }, s.span())),
            Expr::GetAttr(s) => {
                Expr::GetAttr(Spanned::new(GetAttr { expr: self.target(&s.expr)?, name: s.name }, s.span()))
            }
            other => self.expression(other)?,
        })
    }

    fn expression(&self, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        let span = expr.span();
        Ok(match expr {
            Expr::Var(s) => Expr::Var(Spanned::new(Var { id: s.id }, span)),
            Expr::Const(s) => constant(s.value.clone(), span),
            Expr::Slice(s) => {
                let mut args = vec![self.expression(&s.expr)?];
                for bound in [&s.start, &s.stop, &s.step] {
                    args.push(bound.as_ref().map_or_else(|| Ok(constant((), span)), |it| self.expression(it))?);
                }
                call(names::SLICE, args, span)
            }
            Expr::UnaryOp(s) => match s.op {
                UnaryOpKind::Not => {
                    Expr::UnaryOp(Spanned::new(UnaryOp { op: UnaryOpKind::Not, expr: self.expression(&s.expr)? }, span))
                }
                UnaryOpKind::Neg => call(names::NEG, vec![self.expression(&s.expr)?], span),
            },
            Expr::BinOp(s) => {
                let (left, right) = (self.expression(&s.left)?, self.expression(&s.right)?);
                let name = match s.op {
                    op @ (BinOpKind::ScAnd | BinOpKind::ScOr) => {
                        return Ok(Expr::BinOp(Spanned::new(BinOp { op, left, right }, span)));
                    }
                    BinOpKind::Eq => names::EQ,
                    BinOpKind::Ne => names::NE,
                    BinOpKind::Lt => names::LT,
                    BinOpKind::Lte => names::LE,
                    BinOpKind::Gt => names::GT,
                    BinOpKind::Gte => names::GE,
                    BinOpKind::In => names::IN,
                    BinOpKind::Add => names::ADD,
                    BinOpKind::Sub => names::SUB,
                    BinOpKind::Mul => names::MUL,
                    BinOpKind::Div => names::DIV,
                    BinOpKind::FloorDiv => names::FLOOR_DIV,
                    BinOpKind::Rem => names::REM,
                    BinOpKind::Pow => names::POW,
                    BinOpKind::Concat => names::CONCAT,
                };
                call(name, vec![left, right], span)
            }
            Expr::Compare(s) => {
                let mut comparisons = vec![];
                let mut operands = vec![self.expression(&s.expr)?];
                for op in &s.ops {
                    comparisons.push(match op.op {
                        CompareOpKind::Eq => names::EQ,
                        CompareOpKind::Ne => names::NE,
                        CompareOpKind::Lt => names::LT,
                        CompareOpKind::Lte => names::LE,
                        CompareOpKind::Gt => names::GT,
                        CompareOpKind::Gte => names::GE,
                        CompareOpKind::In => names::IN,
                        CompareOpKind::NotIn => names::NOT_IN,
                    });
                    operands.push(self.expression(&op.expr)?);
                }
                match comparisons[..] {
                    [only] => call(only, operands, span),
                    _ => {
                        operands.insert(0, constant(comparisons.join(" "), span));
                        call(names::CHAIN, operands, span)
                    }
                }
            }
            Expr::IfExpr(s) => {
                let new = IfExpr {
                    test_expr: self.expression(&s.test_expr)?,
                    true_expr: self.expression(&s.true_expr)?,
                    false_expr: s.false_expr.as_ref().map(|it| self.expression(it)).transpose()?,
                };
                Expr::IfExpr(Spanned::new(new, span))
            }
            Expr::Filter(s) => {
                let expr = s.expr.as_ref().map(|it| self.expression(it)).transpose()?;
                Expr::Filter(Spanned::new(Filter { name: s.name, expr, args: self.arguments(&s.args)? }, span))
            }
            Expr::Test(s) => {
                let new = Test { name: s.name, expr: self.expression(&s.expr)?, args: self.arguments(&s.args)? };
                Expr::Test(Spanned::new(new, span))
            }
            Expr::GetAttr(s) => call(names::ATTR, vec![self.expression(&s.expr)?, constant(s.name, span)], span),
            Expr::GetItem(s) => {
                call(names::ITEM, vec![self.expression(&s.expr)?, self.expression(&s.subscript_expr)?], span)
            }
            Expr::Call(s) => Expr::Call(Spanned::new(self.call_of(s)?, span)),
            Expr::List(s) => {
                let items = self.expressions(&s.items)?;
                limited(Expr::List(Spanned::new(List { items }, span)), &s.items)
            }
            Expr::Tuple(s) => {
                let items = self.expressions(&s.items)?;
                limited(Expr::Tuple(Spanned::new(Tuple { items }, span)), &s.items)
            }
            Expr::Map(s) => {
                let new = Map { keys: self.expressions(&s.keys)?, values: self.expressions(&s.values)? };
                limited(Expr::Map(Spanned::new(new, span)), &s.values)
            }
        })
    }
}
