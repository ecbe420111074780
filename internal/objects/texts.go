package objects

import (
	"strings"
	"sync"
)

// Texts turns texts into statements by replacing {words} with names and SQL. It makes each statement once.
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
	before, after, _ := strings.Cut(text, "{where}")
	if condition == "" {
		return t.In(before + after)
	}
	return t.In(before) + condition + t.In(after)
}

// Quoted returns a name quoted as both databases expect it, or the parts of a name with dots between them.
func Quoted(parts ...string) string {
	name := strings.ReplaceAll(strings.Join(parts, "\x00"), `"`, `""`) // no name has a NUL
	return `"` + strings.ReplaceAll(name, "\x00", `"."`) + `"`
}
