package objects

import (
	"strings"
	"sync"
)

// Texts turns texts into statements by replacing {words} with names and SQL. It builds each statement
// once.
type Texts struct {
	words *strings.Replacer
	made  sync.Map // statements, by their texts
}

// NewTexts takes pairs of a {word} and its replacement.
func NewTexts(pairs ...string) *Texts { return &Texts{words: strings.NewReplacer(pairs...)} }

// In returns the statement of a text.
func (t *Texts) In(text string) string {
	if made, ok := t.made.Load(text); ok {
		return made.(string)
	}
	made := t.words.Replace(text)
	t.made.Store(text, made)
	return made
}

// Where returns the statement of a text in which {where} stands for a condition.
func (t *Texts) Where(text, condition string) string {
	if condition == "" {
		return t.In(strings.ReplaceAll(text, "{where}", ""))
	}
	parts := strings.Split(text, "{where}")
	for i, part := range parts {
		parts[i] = t.In(part)
	}
	return strings.Join(parts, condition)
}

// Quoted returns a name quoted as both databases expect it, or the parts of a name with dots between them.
func Quoted(parts ...string) string {
	name := strings.ReplaceAll(strings.Join(parts, "\x00"), `"`, `""`) // no name has a NUL
	return `"` + strings.ReplaceAll(name, "\x00", `"."`) + `"`
}
